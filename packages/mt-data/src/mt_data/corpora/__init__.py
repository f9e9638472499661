"""Building corpora: cleaning, deduplication, decontamination and URL filtering of files of documents."""
