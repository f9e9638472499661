"""What each kernel computes, in plain torch. Gradients are autograd's unless a function says otherwise."""
