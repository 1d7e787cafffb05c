"""LoRA for ``text_transformer.py``: adapters and head are sent: ``python examples/lora.py``."""

from dataclasses import replace

from peft import LoraConfig, get_peft_model
from torch import nn

import deltafl
from deltafl.tasks import Task
from text_transformer import texts, transformer


def adapted() -> nn.Module:
    """Load the weights of your base here; they stay as they are."""
    lora = LoraConfig(r=4, target_modules=["linear1", "linear2"], modules_to_save=["3"])
    return get_peft_model(transformer(), lora)


def adapters(seed: int) -> Task:
    return replace(texts(seed), make_model=adapted, trainable="lora")


print(f"{deltafl.flatten(adapted(), trainable='lora').size} numbers are sent")
print(deltafl.compare(adapters, ["full", "uniform"], sample=5, rounds=10, local_lr=0.3, seeds=1))
