#!/bin/sh
# Removes all but the newest backups of a directory.
dir=$1
keep=$2
count=0
for file in $(ls -t $dir/backup-*); do
  count=$((count + 1))
  if [ "$count" -gt $((keep + 1)) ]; then
    rm -f $file
  fi
done
