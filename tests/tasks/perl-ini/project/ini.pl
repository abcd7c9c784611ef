#!/usr/bin/perl
use strict;
use warnings;

my ($file, $section, $key) = @ARGV;
open(my $in, '<', $file) or die "$file: $!\n";
my %values;
while (my $line = <$in>) {
    chomp $line;
    my ($name, $value) = split /=/, $line;
    next unless defined $value;
    $values{$name} = $value;
}
print "$values{$key}\n";
