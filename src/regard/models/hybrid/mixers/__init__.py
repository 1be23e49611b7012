"""Token mixers, one file each; `token_mixers` imports all files of this folder."""
