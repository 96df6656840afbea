"""The live dashboard: pages that organisers and volunteers look at, served by this machine alone.

Without NiceGUI (pure, or plain asyncio):
    login.py      the organiser's token, sessions, how often somebody may try
    actions.py    what organisers have done, in a log
    charts.py     charts, as ECharts wants them
    state.py      what all pages of one dashboard share
    metrics.py    the run for Prometheus

With it (`pip install 'potluck-train[dashboard]'`):
    server.py     the web server: pages, login, metrics, and what protects them
    frame.py      what every page has around it; parts.py: cards, figures, bars
    pages/        a file per page
    static/       style and login form, so that nothing is loaded from elsewhere
"""
