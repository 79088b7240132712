"""What a user reads: `explain` in text and pictures.

`explain.py` builds the explanation from `findings.py` (what there is to say) and `saved.py` (why a tensor is saved).
`text.py` writes what is printed, `pictures.py` draws it; `curves.py` is the curve of live memory in both, `lives.py`
says where the largest tensors are at each time. `notebook.py` wraps printed text as HTML. `devices.py` is the table of
devices. The tables of `measure`, `frontier` and `largest_batch` are in `callable/`.
"""
