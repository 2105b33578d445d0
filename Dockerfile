# The host and all plugins for NVIDIA GPUs:  docker build -t rlhf-host .
# The CUDA toolkit of the base is for what is compiled at the first use (Triton, FlashInfer, DeepSpeed's operators); torch brings its own
# CUDA libraries. The driver comes from the machine: 580 or newer.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# The verbs libraries are for NCCL over InfiniBand.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential python3-dev python3-venv ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/rlhf/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/rlhf

WORKDIR /opt/rlhf-host
COPY . .
RUN pip install -c constraints/cuda.txt '.[all,cluster,deepspeed,vllm,peft,bitsandbytes]' ./plugins/*/*
