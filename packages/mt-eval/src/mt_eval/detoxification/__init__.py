"""How toxic the texts of a model are, and finetuning on its least toxic ones (SGEAT, Wang et al. 2022)."""
