"""Storms over many runs: `invoke chaos campaign`.

`cases.py` says what is trained, `volleys.py` draws the faults and `injection.py` injects them. `campaign.py` makes one
run after the other and compares it with an undisturbed one; `record.py` counts the results for docs/guides/faults.md.
"""
