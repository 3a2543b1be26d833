"""A process to be started on another machine: it serves nothing, but follows the protocol of the run's child
processes."""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind", default="")
    parser.add_argument("--fail", default="")
    parser.add_argument("--leave-after", type=float, default=600.0)
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--watch-fd", type=int)
    options = parser.parse_args()
    threading.Thread(target=lambda: (os.read(options.watch_fd, 1), os._exit(3)), daemon=True).start()
    print(
        f"hello from {os.getpid()}, token {len(os.environ.get('UNDERSTUDY_TOKEN', ''))} letters", flush=True
    )
    if options.fail:
        raise ValueError(options.fail)
    fresh = options.ready_file.with_suffix(".new")
    fresh.write_text(json.dumps({"url": f"http://{options.bind}", "pid": os.getpid()}))
    fresh.replace(options.ready_file)
    time.sleep(options.leave_after)
    print("goodbye", flush=True)
    return 7


if __name__ == "__main__":
    sys.exit(main())
