#!/bin/sh
# Greets each name.
count=1
upper=
while [ $# -gt 0 ]; do
  case $1 in
    -n) count=$2; shift ;;
    -u) upper=1 ;;
    *) break ;;
  esac
  shift
done
for name in $*; do
  i=0
  while [ "$i" -lt "$count" ]; do
    if [ -n "$upper" ]; then
      echo "HELLO $(echo $name | tr a-z A-Z)"
    else
      echo "Hello $name"
    fi
    i=$((i + 1))
  done
done
