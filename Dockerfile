# resilient_train on top of an image that brings its own torch.
#
#   docker build -t resilient-train .
#   docker build -t resilient-train --build-arg BASE=pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime .
#   docker run --gpus all --ipc=host -v "$PWD/runs:/workspace/runs" resilient-train model=gpt
#
# The default wants an NVIDIA driver of at least 580; older drivers take the second line. Any base will do that
# has Python 3.11 or newer with torch and pip. --ipc=host, because workers hand batches over in shared memory.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
FROM ${BASE}

ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="resilient_train" \
      org.opencontainers.image.description="A training run that looks after itself" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"

# An environment on top of the base's packages: pip may not touch those of a distribution (PEP 668), and here it
# cannot. --without-pip, because many bases lack ensurepip; pip is seen through from the base. Its own torch is held
# in place by a constraint, and compared afterwards, by version and by path: a CUDA build is not to be replaced.
COPY pyproject.toml README.md LICENSE /src/
COPY conf /src/conf
COPY resilient_train /src/resilient_train
RUN set -eu; \
    torch='from importlib.metadata import version; import torch; print("torch==" + version("torch"), "#", torch.__version__, torch.__file__)'; \
    python3 -c "$torch" > /src/torch.txt; \
    python3 -m venv --without-pip --system-site-packages /opt/resilient; \
    /opt/resilient/bin/python -m pip install --no-cache-dir --constraint /src/torch.txt "/src[app,hf]"; \
    /opt/resilient/bin/python -c "$torch" > /src/torch-now.txt; \
    diff /src/torch.txt /src/torch-now.txt; \
    rm -r /src
ENV PATH=/opt/resilient/bin:$PATH

# An ordinary user. Clusters that choose another one (--user) find a home that is open to all, and a name: torch asks
# for both when it looks for its caches.
ARG UID=10001
RUN useradd --uid "${UID}" --home-dir /workspace --no-create-home trainer \
    && install --directory --owner trainer --mode 1777 /workspace /workspace/runs
ENV HOME=/workspace USER=trainer
USER ${UID}
WORKDIR /workspace
VOLUME /workspace/runs

# A stop on request (docker stop, preemption) comes as SIGTERM to this process, and reaches the run where accelerate uses
# torch's agent: on more than one GPU. On one, accelerate keeps it from the run. There:
#   docker run --gpus 1 --entrypoint python resilient-train -m torch.distributed.run --standalone \
#     -m resilient_train model=gpt
ENTRYPOINT ["accelerate", "launch", "-m", "resilient_train"]
