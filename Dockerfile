# Everything without a GPU, from the pins: `docker build -t marft-bridge .`, then
# `docker run --rm -it -v "$PWD:/app" -w /app marft-bridge traces list --store traces.duckdb`.
FROM python:3.11-slim-bookworm

# vLLM's CPU build compiles kernels when it starts, which takes a C++ compiler; bubblewrap walls in the programs of rewards.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ libnuma1 libgomp1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/marft-bridge
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY marft_bridge marft_bridge
COPY trace_store trace_store
COPY trainers trainers
# As `make setup`: torch's CPU build from PyTorch's own index, all else by the hashes of cpu.lock, then this package.
ENV MARFT_TORCH_INDEX=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python requirements/set_up.py

RUN useradd --create-home --uid 1000 bridge
USER bridge
ENV PATH=/opt/marft-bridge/.venv/bin:$PATH
ENTRYPOINT ["marft-bridge"]
CMD ["--help"]
