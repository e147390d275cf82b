"""How processes join a run, agree, and notice a request to stop or the loss of one of them."""
