"""Secure aggregation by hand: the arithmetic of Flower's SecAgg+ with deltafl's coefficients. Masks
cancel in the sum.

Every pair of clients agrees on a key and makes the same mask from it, which one adds and the other
subtracts. The server sees numbers that look random, and their sum. Needs
``pip install 'deltafl[flower]'``. Of SecAgg+ it leaves out the messages and the shares by which the
masks of clients that fall silent are taken off again.
"""

import numpy as np
import numpy.typing as npt
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import generate_key_pairs

from deltafl import close_round, close_round_from_sum, init_round, make_plan, open_round

D = 6
RANGE = 8.0
STEPS = 2**22
MODULUS = 2**32  # numbers in [-RANGE, RANGE], in so many steps, added modulo MODULUS

plan = make_plan("md-fixed", [120, 40, 300, 80, 60, 200], n=4)
state = init_round(plan, np.zeros(D))
cohort = open_round(plan, state)
clients = range(len(cohort.client_n))
coef_n = plan.collect_replies(
    state, cohort
).coef_n  # public: each client is sent its own, with the model
update_nd = np.random.default_rng(0).normal(size=(len(clients), D))  # each client's secret

key_pairs = [generate_key_pairs() for _ in clients]  # each sends its public key to the others


def mask(client: int, other: int) -> npt.NDArray[np.int64]:
    """What client adds for one other client, and the other subtracts."""
    seed = generate_shared_key(key_pairs[client][0], key_pairs[other][1])
    mask_d: npt.NDArray[np.int64] = pseudo_rand_gen(seed, MODULUS, [(D,)])[0]
    return mask_d if client < other else -mask_d


def send(client: int) -> npt.NDArray[np.int64]:
    """The weighted update in whole numbers, with masks."""
    whole_d = quantize([coef_n[client] * update_nd[client]], RANGE, STEPS)[0].astype(np.int64)
    masks = [mask(client, other) for other in clients if other != client]
    return np.asarray(np.sum([whole_d, *masks], axis=0) % MODULUS)


sent_nd = [send(client) for client in clients]
whole_d = np.sum(sent_nd, axis=0) % MODULUS
sum_d = (
    dequantize([whole_d], RANGE, STEPS)[0] - (len(clients) - 1) * RANGE
)  # each was shifted by RANGE
secure, _ = close_round_from_sum(plan, state, cohort, [True] * len(clients), sum_d)
plain, _ = close_round(plan, state, cohort, update_nd)
print("sent by the first client", sent_nd[0])
print(f"largest difference of the models {np.abs(secure.params_d - plain.params_d).max():.1e}")
