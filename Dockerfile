# One image for all roles. Targets: `cpu`, and `cuda` with the wheels of torch that bring CUDA along.
#
#   docker build --target cpu --tag hetpipe:0.1.0-cpu .
#
# Everything is installed in stages that are thrown away; what is copied out of them is one layer for torch, one for the
# other dependencies and one for hetpipe itself, so that a change of the code moves the last one only. The stages are in
# this order because docker's classic builder builds all stages above its target. docs/docker.md says more.

# What the image stands on, and what its parts are installed in: the same, unless that needs to know a proxy, a mirror or
# a CA of yours (scripts/offline-base-image makes such a pair). Both need the same python3 at the same place.
ARG BASE_IMAGE=python:3.12.11-slim-bookworm
ARG BUILD_IMAGE=${BASE_IMAGE}

FROM ${BUILD_IMAGE} AS build
# Versions and bytes are those of the lock: a constraint file that pip's configuration names would only be in the way.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_ONLY_BINARY=:all: \
    PIP_CONSTRAINT=/dev/null PATH=/opt/hetpipe/bin:$PATH
RUN python3 -m venv /opt/hetpipe
WORKDIR /build
COPY requirements.lock requirements-torch.lock requirements-torchvision.lock ./
COPY deploy/image/locked ./

FROM build AS dependencies
# `models` adds transformers, timm, peft and torchvision to the image.
ARG EXTRAS=
RUN case "$EXTRAS" in ""|models) ;; *) echo "EXTRAS is \"$EXTRAS\": use models, or leave it empty" >&2; exit 1;; esac
RUN python3 locked requirements.lock build run > run.lock \
 && pip install --prefix=/opt/layer --require-hashes --requirement run.lock
# The section has all that they require but torch, which is a layer of its own.
RUN if [ -n "$EXTRAS" ]; then \
      python3 locked requirements.lock "$EXTRAS" > extras.lock \
      && pip install --prefix=/opt/layer --no-deps --require-hashes --requirement extras.lock; \
    fi

FROM build AS application
RUN python3 locked requirements.lock build > build.lock \
 && pip install --require-hashes --requirement build.lock
COPY pyproject.toml setup.py README.md LICENSE docker-compose.yml ./
COPY deploy/compose deploy/compose
COPY k8s k8s
COPY examples examples
COPY hetpipe hetpipe
RUN pip install --prefix=/opt/layer --no-deps --no-build-isolation .

FROM ${BASE_IMAGE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="hetpipe" \
      org.opencontainers.image.description="Train one PyTorch model on the unequal GPUs you already have" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# A new named volume takes its owner from the folder it is mounted over, so those of one box are made here.
RUN groupadd --gid 10001 hetpipe \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin hetpipe \
 && for name in . store redis coordinator operator-box \
      parameter-server-0 parameter-server-1 agent-a agent-b agent-c agent-d agent-gpu; \
    do install -d -o 10001 -g 10001 -m 0755 "/credentials/$name"; done \
 && install -d -o 10001 -g 10001 -m 0755 /runs /cache /state \
 && install -d -m 0755 /code && ln -s /runs /code/runs
ENV PATH=/opt/hetpipe/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    XDG_CACHE_HOME=/cache
# Jobs are handed in here: what they name is found below the current folder.
WORKDIR /code
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["hetpipe-entrypoint"]
CMD ["--help"]

# pip sees what torch needs in the layer of the dependencies, which is not part of this one. A torchvision whose operators
# are those of another build of torch does not import: it ends the build here.
FROM dependencies AS torch-cpu
# The index of the wheels without CUDA; empty: where pip looks anyway.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
RUN export PYTHONPATH="$(echo /opt/layer/lib/python3*/site-packages)" PIP_INDEX_URL="$TORCH_CPU_INDEX" \
 && if [ -z "$PIP_INDEX_URL" ]; then unset PIP_INDEX_URL; fi \
 && pip install --requirement requirements-torch.lock \
 && if [ -n "$EXTRAS" ]; then \
      pip install --no-deps --requirement requirements-torchvision.lock && python3 -c "import torchvision"; \
    fi \
 && pip uninstall --yes setuptools pip

FROM runtime AS cpu
COPY --from=torch-cpu /opt/hetpipe /opt/hetpipe
COPY --from=dependencies /opt/layer /opt/hetpipe
COPY --from=application /opt/layer /opt/hetpipe
COPY deploy/image/hetpipe-entrypoint deploy/image/hetpipe-credentials /opt/hetpipe/bin/
COPY examples /code/examples

FROM dependencies AS torch-cuda
ARG EXTRAS=
RUN export PYTHONPATH="$(echo /opt/layer/lib/python3*/site-packages)" \
 && pip install --requirement requirements-torch.lock \
 && if [ -n "$EXTRAS" ]; then \
      pip install --no-deps --requirement requirements-torchvision.lock && python3 -c "import torchvision"; \
    fi \
 && pip uninstall --yes setuptools pip

FROM runtime AS cuda
# Asks the NVIDIA container toolkit for what training needs; which GPUs is said when a container is started.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=torch-cuda /opt/hetpipe /opt/hetpipe
COPY --from=dependencies /opt/layer /opt/hetpipe
COPY --from=application /opt/layer /opt/hetpipe
COPY deploy/image/hetpipe-entrypoint deploy/image/hetpipe-credentials /opt/hetpipe/bin/
COPY examples /code/examples
