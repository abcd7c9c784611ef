# Lines: HOST - - [DATE] "REQUEST" STATUS BYTES MILLISECONDS
{
  count[$9]++
  times[$9, count[$9]] = $11
}

END {
  for (status in count) {
    n = count[status]
    for (i = 2; i <= n; i++) {
      value = times[status, i]
      for (j = i - 1; j >= 1 && times[status, j] > value; j--) times[status, j + 1] = times[status, j]
      times[status, j + 1] = value
    }
    print status, n, times[status, int(n / 2) + 1]
  }
}
