# The gateway: HTTP and gRPC, without torch or Ray. From the root of a checkout:
#
#   docker build -f docker/gateway.Dockerfile -t outrider-gateway .
#
# BASE_DIGEST pins the base beyond its tag, as --build-arg BASE_DIGEST=@sha256:...

ARG BASE_TAG=3.11.14-slim-bookworm
ARG BASE_DIGEST=

FROM python:${BASE_TAG}${BASE_DIGEST} AS build
RUN pip install --no-cache-dir "setuptools>=77"
COPY . /checkout
RUN /checkout/docker/build-wheel.sh /dist \
 && /checkout/docker/install.sh gateway /dist/*.whl /opt/outrider

FROM python:${BASE_TAG}${BASE_DIGEST}
COPY docker/sbom.py /usr/local/share/
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin outrider \
 && install -d -o outrider -g outrider /var/cache/outrider \
 && install -d /usr/share/sbom \
 && python3 /usr/local/share/sbom.py debian python > /usr/share/sbom/base.cdx.json \
 && ln -s /opt/outrider/share/sbom/outrider.cdx.json /usr/share/sbom/
COPY --from=build /opt/outrider /opt/outrider
# Listening beyond the container needs keys, see docs/security.md.
ENV PATH=/opt/outrider/bin:$PATH \
    HF_HOME=/var/cache/outrider/hub \
    OUTRIDER_CACHE=/var/cache/outrider \
    OUTRIDER_SERVER_HOST=0.0.0.0 \
    OUTRIDER_SERVER_ADMIN_PORT=8081 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/outrider
EXPOSE 8000 50051 8081
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["healthcheck.sh"]
ENTRYPOINT ["entrypoint.sh"]
CMD ["outrider", "gateway"]
