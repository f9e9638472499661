"""The cards of model families in docs/models: what was compared with what, the largest errors, the layouts proved.

`python -m scripts.model_cards.record [FAMILY ...]` runs the comparisons and writes their numbers to results.json;
`python -m scripts.model_cards` writes the cards and the table of all families from it.
"""
