"""What a training loop decides between its steps. Decisions only, as all of `core`.

discards        what would help where steps are discarded again and again; pauses between two tries
following       which call follows a step that counts: of a scheduler, of a gradient scaler
goodput         a job's accounts, of the lines of all its ranks
graphs          which forward passes wait for their backward passes, so that nothing is loaded in between
ledger          what the training thread spends its time on
microbatches    who computes which microbatches of a step, how they are summed, and what each sees
outer_schedule  when an outer loop exchanges a fragment, and what becomes of its round
shared_step     which optimizers take part in one step, and when another one begins
taking          when the optimizers have taken a step that counts
"""
