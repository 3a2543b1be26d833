"""`understudy view`: a page over run directories, live or dead. Reads them, never writes to them.

    run directory ──> observability/lines.py (whole lines since the last look) ──> metrics, spans, rows: indexes in memory
                      journal_rows.py, token_text.py              ──> token columns of one row, on demand
    server.py: HTTP on loopback, JSON by range                    ──> page/: plain ES modules, uPlot

| module | its job |
|---|---|
| `spans` | when which span ran: columns of numbers, lines by offset |
| `rows` | the table of rows: figures in memory, text by offset |
| `journal_rows` | rows in flight, from the journal, with their token columns |
| `token_text` | ids to text, token by token |
| `recipe_diff` | which keys differ between runs |
| `token_view` | one row as the microscope shows it |
| `frozen` | report.html: page and data in one file |
| `run_view` | one run: its indexes and the answers to the page's questions |
| `server` | addresses, token, headers |

It does not import torch: a server takes tens of megabytes.
"""
