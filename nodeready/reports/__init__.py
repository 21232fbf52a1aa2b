"""SHOW: one module per output format, from the same Results. No judging here."""
