"""Model -> Artifact: one file per method, calibration sets, artifact writer, inspection."""
