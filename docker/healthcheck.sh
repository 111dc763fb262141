#!/bin/sh
# Liveness of this container's server: the admin port answers. Engines may still be starting.
exec "$(dirname -- "$0")/python" -c '
import os, urllib.request
port = os.environ.get("OUTRIDER_SERVER_ADMIN_PORT", "8081")
urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=3).read()
'
