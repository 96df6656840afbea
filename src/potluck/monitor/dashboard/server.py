"""The web server of a dashboard: pages, the organisers' door, `/metrics`, and what protects them.

Everything is served from this process, nothing is loaded from elsewhere, and the browser is told to load nothing from
elsewhere either. Requests and live connections that come from another site's page are refused; so is whatever only
organisers may see, without a session. The token travels only where nobody can listen: over TLS, or on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import ipaddress
import logging
import socket
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Form, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from nicegui import ui
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from potluck import tasks
from potluck.errors import AccessError, ConfigurationError
from potluck.monitor.dashboard import metrics
from potluck.monitor.dashboard.frame import COOKIE, Page, frame
from potluck.monitor.dashboard.login import SESSION_SECONDS, TooManyTriesError, is_same_origin
from potluck.monitor.dashboard.pages.control import ControlPage
from potluck.monitor.dashboard.pages.fleet import FleetPage
from potluck.monitor.dashboard.pages.joblog import JobLogPage
from potluck.monitor.dashboard.pages.leaderboard import LeaderboardPage
from potluck.monitor.dashboard.pages.members import MembersPage
from potluck.monitor.dashboard.pages.naming import NamingPage
from potluck.monitor.dashboard.pages.overview import OverviewPage
from potluck.monitor.dashboard.pages.paths import PathsPage
from potluck.monitor.dashboard.pages.peers import PeerPage, PeersPage
from potluck.monitor.dashboard.pages.pipeline import PipelinePage
from potluck.monitor.dashboard.pages.preview import PreviewPage
from potluck.monitor.dashboard.pages.queues import QueuesPage, ValuePage
from potluck.monitor.dashboard.pages.rounds import RoundsPage
from potluck.monitor.dashboard.state import Dashboard

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
HEAD = '<link rel="icon" href="/static/mark.svg"><link rel="stylesheet" href="/static/potluck.css">'
# Vue compiles its templates in the browser, which needs 'unsafe-eval'; nothing that peers chose is part of a template.
CONTENT_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self' ws: wss:; frame-ancestors 'none'; "
    "base-uri 'self'; form-action 'self'"
)
HEADERS = (
    (b"content-security-policy", CONTENT_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
)
CLOSING_SECONDS = 2
USUAL_PORT = 8484
LONGEST_ID = 64

Fill = Callable[[Page], object]
PAGES: tuple[tuple[str, str, Fill], ...] = (
    ("/", "Overview", OverviewPage),
    ("/rounds", "Rounds", RoundsPage),
    ("/peers", "Peers", PeersPage),
    ("/leaderboard", "Leaderboard", LeaderboardPage),
    ("/preview", "Preview", PreviewPage),
    ("/name", "Name it", NamingPage),
    ("/fleet", "Fleet", FleetPage),
    ("/paths", "Paths", PathsPage),
    ("/pipeline", "Pipeline", PipelinePage),
    ("/queues", "Queues", QueuesPage),
    ("/value", "Value network", ValuePage),
)
ORGANISER_PAGES: tuple[tuple[str, str, Fill], ...] = (
    ("/members", "Members", MembersPage),
    ("/control", "Control", ControlPage),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where pages are served."""

    host: str = "127.0.0.1"
    port: int | None = None
    """0: any that is free; None: the usual one, or any if that is taken."""
    certificate: Path | None = None
    """PEM file, for https; with `key`."""
    key: Path | None = None
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies whose X-Forwarded headers are believed; unless named here, nobody's are."""

    def __post_init__(self) -> None:
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError:
                raise ConfigurationError(
                    f"{proxy!r} is not the address of a proxy: write it as in 127.0.0.1 or 10.0.0.0/8"
                ) from None
        if (self.certificate is None) != (self.key is None):
            raise ConfigurationError("https needs both a certificate and its key: name both files, or none")
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ConfigurationError(f"port {self.port}: choose one from 0 to 65535")


class DashboardServer:
    """Serves one dashboard. NiceGUI keeps its pages in the process, so there is one of these in a process."""

    def __init__(self, dashboard: Dashboard, config: ServerConfig) -> None:
        self._dashboard = dashboard
        self._config = config
        self._server: _Uvicorn | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    async def start(self) -> str:
        """Begin to serve; returns the address. ConfigurationError when the port is taken."""
        config = self._config
        self._socket = _listen(config.host, config.port) if config.port is not None else _listen_as_usual(config.host)
        settings = uvicorn.Config(
            Protected(make_app(self._dashboard, config), self._dashboard),
            log_config=None,
            access_log=False,
            server_header=False,
            # uvicorn's default believes every connection from this machine.
            proxy_headers=bool(config.trusted_proxies),
            forwarded_allow_ips=list(config.trusted_proxies),
            ws_max_size=1 << 20,
            timeout_graceful_shutdown=CLOSING_SECONDS,
            ssl_certfile=config.certificate,
            ssl_keyfile=config.key,
        )
        self._server = _Uvicorn(settings)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="dashboard")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise ConfigurationError("the dashboard could not be started: see above")
            await asyncio.sleep(0.02)
        port = self._socket.getsockname()[1]
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
        return f"{'https' if config.certificate else 'http'}://{host}:{port}"

    async def failed(self) -> None:
        """Return never; raise when the server has ended by itself."""
        assert self._task is not None
        await asyncio.shield(self._task)
        raise ConfigurationError("the dashboard's server has ended by itself")

    async def close(self) -> None:
        """Serve no more. Idempotent."""
        if self._server is not None:
            self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * CLOSING_SECONDS):
                    await asyncio.shield(self._task)
            await tasks.end(self._task)
        if self._socket is not None:
            self._socket.close()


class _Uvicorn(uvicorn.Server):
    """Signals are the command's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Protected:
    """In front of the whole application: refuses what comes from another site's page, and sends protecting headers."""

    def __init__(self, app: ASGIApp, dashboard: Dashboard) -> None:
        self.app = app
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        safe = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if not safe and not is_same_origin(headers.get(b"origin"), headers.get(b"host")):
            await _refuse(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        is_gone = False

        async def receive_and_note() -> Message:
            nonlocal is_gone
            message = await receive()
            is_gone = is_gone or message["type"] == "http.disconnect"
            return message

        try:
            await self.app(scope, receive_and_note, send_with_headers)
        except RuntimeError:
            if not is_gone:  # else Starlette complains that nobody is left to be answered
                raise


def make_app(dashboard: Dashboard, config: ServerConfig) -> FastAPI:
    """All that can be asked for."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(metrics.render(dashboard), media_type=metrics.CONTENT_TYPE)

    @app.get("/healthz")
    def healthy() -> dict[str, str]:
        return {"run": dashboard.run, "status": dashboard.status()[0]}

    _add_door(app, dashboard, config)
    _add_pages(dashboard)
    ui.add_head_html(HEAD, shared=True)
    ui.run_with(
        app,
        title=f"Potluck · {dashboard.run}",
        favicon=STATIC / "mark.svg",
        dark=None,
        binding_refresh_interval=None,
        reconnect_timeout=10.0,
        tailwind=False,
        show_welcome_message=False,
    )
    return app


def _add_pages(dashboard: Dashboard) -> None:
    for path, title, fill in PAGES:
        _add_page(dashboard, path, title, fill)
    if dashboard.organising is not None:
        for path, title, fill in ORGANISER_PAGES:
            _add_page(dashboard, path, title, fill, organisers=True)

    @ui.page("/peers/{peer}")
    def show_peer(request: Request, peer: str) -> None:
        with frame(dashboard, request, "/peers", "Peer") as page:
            PeerPage(page, peer[:LONGEST_ID])

    @ui.page("/fleet/log/{job}")
    def show_log(request: Request, job: str) -> RedirectResponse | None:
        if dashboard.visitor(request.cookies.get(COOKIE)) is None:
            return RedirectResponse("/login")
        with frame(dashboard, request, "/fleet", "Log") as page:
            JobLogPage(page, job[:LONGEST_ID])
        return None


def _add_page(dashboard: Dashboard, path: str, title: str, fill: Fill, *, organisers: bool = False) -> None:
    @ui.page(path)
    def show(request: Request) -> RedirectResponse | None:
        if organisers and dashboard.visitor(request.cookies.get(COOKIE)) is None:
            return RedirectResponse("/login")
        with frame(dashboard, request, path, title) as page:
            fill(page)
        return None


def _add_door(app: FastAPI, dashboard: Dashboard, config: ServerConfig) -> None:
    template = string.Template((STATIC / "login.html").read_text(encoding="utf-8"))

    def form(message: str = "", *, wrong: bool = False, name: str = "", status: int = 200) -> HTMLResponse:
        text = message or "`potluck host` prints the token when it starts, and an address that has it in already."
        values = {"run": dashboard.run, "message": text, "tone": "wrong" if wrong else "", "name": name[:40]}
        return HTMLResponse(template.substitute({k: html.escape(v) for k, v in values.items()}), status)

    def obstacle(request: Request) -> str:
        if dashboard.organising is None:
            return "This dashboard only looks. Organisers use the one on the machine that hosts the run."
        if not config.trusted_proxies and "x-forwarded-for" in request.headers:
            return (
                "This request came through a proxy, and the dashboard was not told to trust one: who sent it, and "
                "whether the token travelled in the clear, is unknown. Start the dashboard with --trust-proxy ADDRESS "
                "(potluck host: --dashboard-trust-proxy)."
            )
        if request.url.scheme != "https" and not _is_loopback(request):
            return (
                "Your token would travel in the clear. Open this page on the host itself or through an SSH tunnel "
                "(ssh -L PORT:127.0.0.1:PORT HOST), or serve the dashboard by https (--certificate and --key)."
            )
        return ""

    @app.get("/login")
    def show_door(request: Request) -> Response:
        problem = obstacle(request)
        return form(problem, wrong=bool(problem), status=403 if problem else 200)

    @app.post("/login")
    def enter(request: Request, token: str = Form(""), name: str = Form("")) -> Response:
        problem = obstacle(request)
        if problem or dashboard.organising is None:
            return form(problem, wrong=True, status=403)
        address = request.client.host if request.client is not None else ""
        try:
            session = dashboard.organising.gate.enter(token, name, address)
        except TooManyTriesError as error:
            return form(str(error), wrong=True, name=name, status=429)
        except (AccessError, ConfigurationError) as error:
            return form(str(error), wrong=True, name=name, status=403)
        response = RedirectResponse("/members", status_code=303)
        response.set_cookie(
            COOKIE,
            session,
            max_age=int(SESSION_SECONDS),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    @app.post("/logout")
    def leave(request: Request) -> Response:
        if dashboard.organising is not None:
            dashboard.organising.gate.leave(request.cookies.get(COOKIE))
        response = RedirectResponse("/", status_code=303)
        response.delete_cookie(COOKIE)
        return response


def _is_loopback(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await Response("not from here\n", status_code=403, media_type="text/plain")(scope, receive, send)


def _listen_as_usual(host: str) -> socket.socket:
    try:
        return _listen(host, USUAL_PORT)
    except ConfigurationError:
        return _listen(host, 0)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigurationError(
            f"the dashboard cannot listen on {host}, port {port} ({error.strerror}): choose another port"
        ) from error
    listening.setblocking(False)
    return listening
