"""What `examples/train_diloco.py` needs beside its training loop: a task, a job of several groups, links, a picture.

| module    | what it is                                                                                          |
|-----------|-----------------------------------------------------------------------------------------------------|
| `task`    | the demo's GPT cut into fragments, its batches, its held-out loss, the digest of what groups share   |
| `options` | the options of a group, and those of the whole                                                       |
| `baseline`| the same task under plain data-parallel training, which averages gradients at every step             |
| `records` | what a group writes down at every inner step, and how much its interface has sent                    |
| `links`   | a network namespace for each group, with a link of limited rate                                      |
| `job`     | one job: a lighthouse and groups as processes, which are killed and started again                    |
| `figures` | loss over bytes and the other figures that follow from the records; pure                             |
| `plot`    | the picture                                                                                          |
| `launch`  | the order of things when the script is started by hand: job, other job, table, picture               |
"""
