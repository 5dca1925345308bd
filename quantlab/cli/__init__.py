"""The front door: flags -> Spec -> run -> render. One file per subcommand."""
