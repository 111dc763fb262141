"""The load-testing harness: requests that arrive, from clients that keep their own books.

    prompts, traces ──► plan ──► client processes ──► targets ──► any server
                                  │ records
                                  ▼
             requests.jsonl ──► measures ──► statistics ──► verdicts, report

`plan` says what is done; `asks` and `records` are what goes out and what comes back; everything
after the run is computed from the files it left, so a run can be looked at again at any time.
"""
