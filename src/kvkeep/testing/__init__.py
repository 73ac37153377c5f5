"""Parts for tests, kept as product: models and simulations that anyone building on kvkeep may use."""
