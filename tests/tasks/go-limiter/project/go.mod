module limiter

go 1.18
