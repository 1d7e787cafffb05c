"""Which sentences are about weather? A small GPT-2, of which LoRA alone is trained and sent."""

import numpy as np
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification

import deltafl
from deltafl.tasks import Dataset, Task, cross_entropy


class Classifier(nn.Module):
    """The logits, as a task wants them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 11, "n_embd": 32, "n_layer": 2, "n_head": 2}
        config = GPT2Config.from_dict({**sizes, "eos_token_id": 0, "pad_token_id": 0})
        lora = LoraConfig(task_type="SEQ_CLS", target_modules=["c_attn"], fan_in_fan_out=True)
        self.model = get_peft_model(GPT2ForSequenceClassification(config), lora)

    def forward(self, token: Tensor) -> Tensor:
        return self.model(input_ids=token).logits  # type: ignore[no-any-return]


def make_task(seed: int) -> Task:
    rng = np.random.default_rng(seed)  # sentences of an article (0, 1, 2) and a noun (3, ..., 10)
    x = np.stack([rng.integers(0, 3, 600), rng.integers(3, 11, 600)], axis=1)
    y = (x[:, 1] < 7).astype(np.int64)  # rain, snow, wind, sun; not train, tea, cat, piano
    data = Dataset("sentences", x[:500], y[:500], x[500:], y[500:], 2)
    rows = np.split(np.arange(500), 20)
    return Task("text", data, rows, Classifier, cross_entropy, tokens=True, trainable="lora")


print(deltafl.compare(make_task, ["full", "uniform"], sample=5, rounds=10, local_lr=0.3, seeds=1))
