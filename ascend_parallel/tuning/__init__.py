"""Choose chunk counts: by a cost model, and by measurements on real ranks."""
