# The GPU image: CUDA, torch, megatron-core, DeepSpeed, mpi4py and, unless APEX=0, NVIDIA's apex built from source.
#   docker build -t miras-megatron .
#   docker build -t miras-megatron --build-arg APEX=0 .
#   docker run --gpus all --ipc=host -v "$PWD/runs:/home/miras/runs" miras-megatron miras-train configs/runs/debug_cpu.yaml
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04

ARG TORCH=2.13.0
ARG MEGATRON_CORE=0.19.2
ARG DEEPSPEED=0.19.8
ARG MPI4PY=4.1.2
# apex: 1 builds it, 0 leaves it out. The PyPI package of that name is another project, so it is built from its repository.
ARG APEX=1
ARG APEX_REPOSITORY=https://github.com/NVIDIA/apex.git
ARG APEX_REF=master
# compute capabilities that CUDA code is built for
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0"
ARG MAX_JOBS=8

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

RUN apt-get update && apt-get install -y --no-install-recommends \
        python3 python3-dev python3-venv git build-essential ninja-build \
        openmpi-bin libopenmpi-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/miras
ENV PATH=/opt/miras/bin:$PATH

# the triton that this torch asks for comes with it
RUN pip install --upgrade pip "setuptools>=77" wheel packaging \
    && pip install "torch==${TORCH}" \
    && pip install "megatron-core==${MEGATRON_CORE}" "mpi4py==${MPI4PY}" psutil \
    && DS_BUILD_OPS=0 pip install "deepspeed==${DEEPSPEED}"

RUN if [ "${APEX}" = 1 ]; then \
        git clone "${APEX_REPOSITORY}" /tmp/apex \
        && git -C /tmp/apex checkout "${APEX_REF}" \
        && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST}" MAX_JOBS="${MAX_JOBS}" \
           pip install --no-build-isolation /tmp/apex \
        && rm -rf /tmp/apex; \
    fi

RUN useradd --create-home --shell /bin/bash miras
WORKDIR /home/miras/miras-megatron
COPY --chown=miras:miras . .
RUN pip install --no-build-isolation --editable . \
    && chown -R miras:miras /home/miras

USER miras
# fails here, not on the cluster, where a package is missing
RUN python -c "import torch, megatron.core, deepspeed, miras_megatron; print(torch.__version__, megatron.core.__version__)"
CMD ["bash"]
