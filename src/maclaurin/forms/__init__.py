"""What a spec means, in plain torch, any dtype: features, parallel, chunked, recurrent, state."""
