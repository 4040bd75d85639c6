"""Is a model fit for record-wise clipping, and does it stay the one that was checked?"""
