"""Client-level differential privacy: what is done to uploads (mechanism), and which ε that gives
(accountant). May import everything up to methods."""
