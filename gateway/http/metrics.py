"""The Prometheus endpoint."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from outrider.gateway.http.access import CallerOf, GatewayOf
from outrider.gateway.metrics.page import CONTENT_TYPE, MetricsPage

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, gateway: GatewayOf, caller: CallerOf) -> Response:
    """Metrics of the gateways and their engines, in Prometheus's text format."""
    state = request.app.state
    page: MetricsPage | None = getattr(state, "metrics_page", None)
    if page is None:
        page = state.metrics_page = MetricsPage(gateway, state.ask_cluster)
    return Response(await page.render(), media_type=CONTENT_TYPE)
