"""The router: requests, placement, admission and the two faces. It knows no weights and no page's bytes."""
