"""Two BERT encoders, of questions and of texts, trained to find the text that a question comes from."""
