"""What a run sends to other programs (`run.loggers`), on a thread beside the training.

logged_metrics.py   metrics.jsonl and the thread
kinds.py          tensorboard, wandb, trackio, mlflow: metrics
traces.py         trackio: kept rows as traces; opentelemetry: spans.jsonl as OTLP spans
"""
