"""The drawings and plots of the documentation, as SVG files that follow the reader's light or dark scheme.

python -m scripts.figures            writes all of them into docs/figures
python -m scripts.figures NAME ...   writes those alone
python -m scripts.figures.record     runs the trainings whose results some of them show, into scripts/figures/data
"""
