"""What third parties need to run here: megatron-core without CUDA, NVIDIA's apex where it is installed.

megatron-core warns at import of every optional package that it does without. No user can or should act on
that, so those messages, and no others, are silenced as soon as anything of this package is imported.
"""

import warnings

OPTIONAL = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "absl.logging is not installed",
    "When using async grad allreduce it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    "full scope is deprecated. Use empty cuda_graph",
    "`load_state_dict` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    "`torch.distributed.reduce_scatter_tensor` is deprecated",
    "`torch.distributed.all_gather_into_tensor` is deprecated",
)
"""How the messages begin; from the fifth on they are about what core itself calls and defaults to."""

for message in OPTIONAL:
    warnings.filterwarnings("ignore", message=message)
