"""One module per group of paths; each has `ROUTES`, a list of starlette's routes. `app.py` lists the modules."""
