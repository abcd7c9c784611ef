module ring

go 1.18
