"""Small languages whose best policy is known exactly, and the product's trainer on them."""
