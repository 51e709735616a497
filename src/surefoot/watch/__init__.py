"""`surefoot watch`: shows runs while they train, in a terminal or on a local web page; reads them and never writes.

| file | contents |
|---|---|
| `find_runs.py` | the newest run below a folder, and the others |
| `live_run.py` | one run, followed at a cursor: numbers, layers, events, whether its process lives |
| `run_state.py` | whether a run is running, has ended, died or was deleted |
| `event_tail.py` | events as they are appended, and the lines for people made of them |
| `run_verdict.py` | the verdict and the incidents of a run |
| `current_numbers.py` | the newest values, speed, memory, and what the machine waits for |
| `screen.py`, `key_presses.py`, `terminal.py` | the terminal: what is shown, the keys, and the loop between them |
| `page_data.py`, `web_server.py`, `frozen_page.py`, `assets/` | the web page: its data, its server, one-file copies |
"""
