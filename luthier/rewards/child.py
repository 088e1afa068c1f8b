"""The process of a reward function: ``python -m luthier.rewards.child FILE NAME BYTES``. One call a line."""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys


def main() -> None:
    """Load the function, say so, and answer calls until there are no more."""
    path, name, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the function prints goes to the log
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def tell(**result: object) -> None:
        channel.write(json.dumps(result) + "\n")
        channel.flush()

    try:
        function = runpy.run_path(path).get(name)
    except BaseException as error:  # noqa: BLE001  the user's file may do anything
        tell(error=f"its file raises {type(error).__name__}: {error}"[:300])
        return
    if not callable(function):
        tell(error=f"its file has no function {name}")
        return
    tell(ready=True)
    for line in sys.stdin:
        arguments = json.loads(line)
        call = arguments.pop("call")
        try:
            reward = function(arguments.pop("answer"), **arguments)
        except BaseException as error:  # noqa: BLE001
            tell(call=call, error=f"raises {type(error).__name__}")
            continue
        if reward is None or isinstance(reward, bool | int | float):
            tell(call=call, reward=reward)
        else:
            try:
                tell(call=call, reward=float(reward))  # of numpy, torch
            except (TypeError, ValueError):
                tell(call=call, error=f"gives a {type(reward).__name__}, which is no number")


if __name__ == "__main__":
    main()
