"""Everything that wants a GPU, in one run: `scripts/gpu_check.py`.

`plan` lists the stages, `check` runs each in a process of its own, `stage` is that process, and
`report` makes of their results what a person reads. Every other module is one stage.
"""
