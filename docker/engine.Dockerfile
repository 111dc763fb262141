# Controller, engines, ranks, gateways. From the root of a checkout:
#
#   docker build -f docker/engine.Dockerfile -t outrider-engine .                  with CUDA
#   docker build -f docker/engine.Dockerfile --target cpu -t outrider-engine-cpu . without
#
# BASE_DIGEST pins the base beyond its tag, as --build-arg BASE_DIGEST=@sha256:...

ARG BASE_TAG=3.11.14-slim-bookworm
ARG BASE_DIGEST=

FROM python:${BASE_TAG}${BASE_DIGEST} AS wheel
RUN pip install --no-cache-dir "setuptools>=77"
COPY . /checkout
RUN /checkout/docker/build-wheel.sh /dist

FROM wheel AS install-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN TORCH_INDEX=${TORCH_INDEX} /checkout/docker/install.sh engine /dist/*.whl /opt/outrider

# torch brings CUDA's libraries; the driver is the host's.
FROM wheel AS install-cuda
RUN /checkout/docker/install.sh engine /dist/*.whl /opt/outrider

# A compiler for our CPU kernels and for Triton's launchers. KubeRay may start login shells, which
# reset PATH.
FROM python:${BASE_TAG}${BASE_DIGEST} AS runtime
COPY docker/sbom.py /usr/local/share/
RUN apt-get update \
 && apt-get install -y --no-install-recommends bash gcc libc6-dev wget \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home --shell /bin/bash outrider \
 && install -d -o outrider -g outrider /var/cache/outrider \
 && echo 'export PATH=/opt/outrider/bin:$PATH' > /etc/profile.d/outrider.sh \
 && install -d /usr/share/sbom \
 && python3 /usr/local/share/sbom.py debian python > /usr/share/sbom/base.cdx.json \
 && ln -s /opt/outrider/share/sbom/outrider.cdx.json /usr/share/sbom/
# Listening beyond the container needs keys, see docs/security.md.
ENV PATH=/opt/outrider/bin:$PATH \
    HF_HOME=/var/cache/outrider/hub \
    OUTRIDER_CACHE=/var/cache/outrider \
    OUTRIDER_SERVER_HOST=0.0.0.0 \
    OUTRIDER_SERVER_ADMIN_PORT=8081 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    TRITON_CACHE_DIR=/var/cache/outrider/triton
USER 10001:10001
WORKDIR /home/outrider
EXPOSE 8000 50051 8081 50060
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["healthcheck.sh"]
ENTRYPOINT ["entrypoint.sh"]
CMD ["outrider", "serve", "--no-ray"]

FROM runtime AS cpu
COPY --from=install-cpu /opt/outrider /opt/outrider

FROM runtime AS cuda
COPY --from=install-cuda /opt/outrider /opt/outrider
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
