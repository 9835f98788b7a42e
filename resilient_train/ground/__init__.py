"""What every module may use: errors, files, settings, records, sentences, secrets."""
