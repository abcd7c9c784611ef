module span

go 1.18
