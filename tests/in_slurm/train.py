"""A replica group of the tests, as `run` starts it: `support/trainer.py`, steered by the files of a folder, `train.py FOLDER`."""

import json
import os
import sys

from support import trainer

group = os.environ["REPLICA_GROUP_ID"]
options = {
    "control": sys.argv[1],
    "replica_id": f"group_{group}",
    "lighthouse": os.environ["TORCHFT_LIGHTHOUSE"],
    "seed": int(group),
    "pause_s": 0.05,
}
sys.argv[1:] = [json.dumps(options)]
trainer.main()
