"""Where examples come from: files of data sets, tables, data sets of PyTorch and Hugging Face."""
