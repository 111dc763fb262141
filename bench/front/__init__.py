"""What a gateway process delivers, by itself: before an engine that computes nothing.

    scripted engine ──link──► gateway process ──gRPC or HTTP──► client process

Each is a process of its own, so the gateway's processor time tells what a token costs there
whatever else the machine does; `python -m outrider.bench.front --help`.
"""
