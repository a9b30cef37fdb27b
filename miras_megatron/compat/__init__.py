"""What third parties need to run here: megatron-core without CUDA, NVIDIA's apex where it is installed."""
